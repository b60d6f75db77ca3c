"""CUDA kernels in Triton, with the interface of the torch reference.

The bits of a result row do not depend on the rest of the pass. Each product's tile, order of
summation and number of splits are fixed by its weight. A tile always has 16 rows. Keys are summed
in blocks fixed by absolute position, over a fixed number of splits. There are no atomics and no
autotuning. Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""
