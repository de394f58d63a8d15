"""The text of matrix products around what emitters fill in: which part a program owns, and how it commits it.

A `Policy` knows no math.  PERSISTENT: a program walks tiles from its own number in steps of the grid.  The others
split the sum over k into SPLITS parts, one program each; the parts of a tile meet in the buffers `parts` (one tile of
fp32 per part and accumulator) and `counters` (of each tile, zero before and after).  LAST_ARRIVER: whoever arrives
last adds all parts in their order, in one round or in two, and runs the epilogue.  TURNSTILE: each part waits for the
one before it, adds itself, and the last runs the epilogue; a wait is for a program with a lower number, which has
started.  PARTS: no program waits or counts; each leaves its part where the product would be, one part after the
other, and the kernel that reads the product adds them up.

Protocol (Triton has no finer fence): a barrier makes the stores of all threads precede the atomic of one, whose release
publishes them; the acquire of whoever reads the counter then precedes its loads, which bypass L1 (`.cg`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.lowering.dependent import LEAD

TURN = 1.15  # each part waits for the one before it: 1.02 to 1.7 times the last arriver's time on an H200


@dataclass(frozen=True)
class Policy:
    """How a kernel is laid out: `text` is filled with the parts of one product; `splits` whether k is split."""

    name: str
    text: str
    grid: str  # programs, over {tiles}
    splits: bool = False
    ordered: bool = False  # the parts of a tile share one buffer, in turn
    leaves: bool = False  # the parts to another kernel
    sliced: bool = False  # each warp takes a slice of each step of k
    handicap: float = 1.0  # how much slower it is than tile arithmetic says

    @property
    def described(self) -> bool:
        """Whether tensor descriptors may move tiles: each program makes its own, and has many tiles or one part of one.

        On an H200, sums in parts took 3 to 8% less time by pointers.
        """
        return not self.splits and not self.sliced


# all columns of a group of GROUP rows of tiles, row by row within a column: tiles that run together share L2
PLACE = '''\
group = {tile} // (GROUP * column_tiles)
height = min(row_tiles - group * GROUP, GROUP)
row_tile = group * GROUP + {tile} % (GROUP * column_tiles) % height
column_tile = {tile} % (GROUP * column_tiles) // height
m_start = {m_start}
n_start = {n_start}'''

# The epilogue of one strip of the tile's columns after the other; states of rows are those of all strips
STRIPS = '''\
for number in tl.static_range(NBLOCK // STRIPBLOCK):
    strip_start = n_start + number * STRIPBLOCK
    {vectors}
    {strips}
    {epilogue}
{end}
'''

_TILES = '''\
row_tiles = ({rows} + MBLOCK - 1) // MBLOCK
column_tiles = ({columns} + NBLOCK - 1) // NBLOCK
tiles = {batch}row_tiles * column_tiles
{descriptors}
'''

# The two loops are one in the schedule (flatten) where descriptors load, so that a tile's first loads overlap the
# epilogue before it; with pointers a flat loop is not pipelined, and with several accumulators the assembler makes each
# instruction of a flat loop's tensor cores wait for the one before
PERSISTENT = Policy("persistent", _TILES + '''\
for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten={flatten}):
    {place}
    {vectors}
    {before}
    {zeros}
    for k_start in range(0, {depth}, KBLOCK):
        {loop}
    {epilogue}
''', "min(PROCESSORS * RESIDENT, {tiles})")

_ONE_TILE = '''\
{place}
{vectors}
{before}
{zeros}
'''

_PART = _TILES + '''\
tile = tl.program_id(0) % tiles
part = tl.program_id(0) // tiles
''' + _ONE_TILE + '''\
steps = ({depth} + KBLOCK - 1) // KBLOCK
for step in range(steps * part // SPLITS, steps * (part + 1) // SPLITS):
    k_start = step * KBLOCK
    {loop}
'''

_LANE = '''\
lane = tl.arange(0, MBLOCK)[:, None] * NBLOCK + tl.arange(0, NBLOCK)[None, :]
'''

PARTS = Policy("parts", "\n".join([*LEAD, _PART]) + "{epilogue}\n", "{tiles} * SPLITS", splits=True, leaves=True)

# Of few rows, whose tiles are as small as a warp's, each program has all of k, and each of its warps a slice of a step
SLICED = Policy("sliced", _TILES + "tile = tl.program_id(0)\n" + _ONE_TILE + '''\
for k_start in range(0, {depth}, KBLOCK):
    {loop}
{epilogue}
''', "{tiles}", sliced=True)

# With more than JOIN parts, whoever is the last of a bundle of so many adds these up, and the last of the bundles' last
# adds up the bundles: the tail of a sum of many parts is that of two short sums.  The loads of TOGETHER parts are under
# way at once
LAST_ARRIVER = Policy("last_arriver", _PART + _LANE + '''\
bundles = (SPLITS + JOIN - 1) // JOIN
{keep}
tl.debug_barrier()
bundle = part // JOIN
first = bundle * JOIN
count = min(SPLITS - first, JOIN)
counter = {counters} + tile * (bundles + 1)
last = tl.atomic_add(counter + bundle, 1, sem="acq_rel") == count - 1
if last:
    {zeros}
    for other in tl.range(first, first + count, loop_unroll_factor=TOGETHER):
        {add_other}
    tl.store(counter + bundle, 0)
    if JOIN < SPLITS:
        {keep_bundle}
        tl.debug_barrier()
        last = tl.atomic_add(counter + bundles, 1, sem="acq_rel") == bundles - 1
        if last:
            {zeros}
            for other in tl.range(SPLITS, SPLITS + bundles, loop_unroll_factor=TOGETHER):
                {add_other}
            tl.store(counter + bundles, 0)
    if last:
        {epilogue}
''', "{tiles} * SPLITS", splits=True)

TURNSTILE = Policy("turnstile", _PART + _LANE + '''\
while tl.atomic_add({counters} + tile, 0, sem="acquire") != part:
    pass
if part > 0:
    {add_other}
if part < SPLITS - 1:
    {keep}
    tl.debug_barrier()
    tl.atomic_xchg({counters} + tile, part + 1, sem="release")
else:
    {epilogue}
    tl.debug_barrier()
    tl.atomic_xchg({counters} + tile, 0, sem="release")
''', "{tiles} * SPLITS", splits=True, ordered=True, handicap=TURN)


def keep(policy: Policy, accumulators: list[str], parts: list[str], number: str = "part") -> list[str]:
    """The lines that leave a part, or what else has this number among the parts, for others."""
    return [f"tl.store({p} + {_place(policy, number)} + lane, {a}, cache_modifier=\".cg\")"
            for a, p in zip(accumulators, parts)]


def add_other(policy: Policy, accumulators: list[str], parts: list[str]) -> list[str]:
    """The lines that add a part that another program left."""
    return [f"{a} += tl.load({p} + {_place(policy, 'other')} + lane, cache_modifier=\".cg\")"
            for a, p in zip(accumulators, parts)]


def _place(policy: Policy, part: str) -> str:
    """Where a part's tile lies in its buffer."""
    number = "tile" if policy.ordered else f"(tile * (SPLITS + bundles) + {part})"
    return f"{number}.to(INDEX) * (MBLOCK * NBLOCK)"


def fill(text: str, parts: dict[str, str | list[str]]) -> list[str]:
    """The lines of a template: a line that is one name in braces becomes that part's lines, at its indentation."""
    lines: list[str] = []
    for line in text.splitlines():
        name = line.strip().removeprefix("{").removesuffix("}")
        block = parts.get(name) if line.strip() == f"{{{name}}}" else None
        if isinstance(block, list):
            indent = line[:len(line) - len(line.lstrip())]
            lines += [indent + inner for inner in block]
        else:
            lines.append(line.format(**{k: v for k, v in parts.items() if isinstance(v, str)}))
    return lines
