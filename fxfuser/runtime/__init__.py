"""Plan -> callable: what runs when, on which buffers, and by which executor."""
