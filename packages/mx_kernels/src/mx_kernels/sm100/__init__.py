"""Blackwell (sm_100a, sm_103a): the grouped block-scaled GEMM on tcgen05 tensor cores."""
