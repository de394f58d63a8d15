"""The text of a persistent matrix product around what emitters fill in.

A program walks tiles from its own number in steps of the grid, a group of GROUP rows of tiles before the next, so that
tiles which run at the same time share rows and columns in L2.  The two loops are one in the schedule (`flatten`) where
descriptors load, so that a tile's first loads overlap the epilogue before it; with pointers a flat loop is not pipelined.
"""

PERSISTENT = '''\
row_tiles = ({rows} + MBLOCK - 1) // MBLOCK
column_tiles = ({columns} + NBLOCK - 1) // NBLOCK
{descriptors}
for tile in tl.range(tl.program_id(0), {batch}row_tiles * column_tiles, tl.num_programs(0), flatten={flatten}):
{place}
{vectors}
{before}
{zeros}
    for k_start in range(0, {depth}, KBLOCK):
{loop}
{epilogue}
'''

# which tile: all columns of a group of rows, row by row within a column
PLACE = '''\
group = tile{in_batch} // (GROUP * column_tiles)
height = min(row_tiles - group * GROUP, GROUP)
row_tile = group * GROUP + tile{in_batch} % (GROUP * column_tiles) % height
column_tile = tile{in_batch} % (GROUP * column_tiles) // height
m_start = row_tile * MBLOCK
n_start = column_tile * NBLOCK'''
