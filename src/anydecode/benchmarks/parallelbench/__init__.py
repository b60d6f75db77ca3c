"""Tasks with checkable answers that measure the quality loss of parallel unmasking, after
ParallelBench (Kang et al., arXiv:2510.04767): generated list operations, arithmetic, records and
code."""
