"""Device-side building blocks, shared by the kernels of every architecture. Imports the DSL; nothing users call does."""
