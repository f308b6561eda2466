"""Memory-bound kernels: one source for sm_90a and sm_100a."""
