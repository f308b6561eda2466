"""Hopper: wgmma GEMMs of BF16 and, dequantised in the main loop, MXFP8 operands; the memory-bound ops of generic/."""
