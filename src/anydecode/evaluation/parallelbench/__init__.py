"""Tasks with checkable answers that show what parallel unmasking costs, after ParallelBench (Kang
et al., arXiv:2510.04767): its list operations, arithmetic, records and code, from a generator."""
