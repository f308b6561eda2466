"""Between compiled host code and the emulator: a stand-in for the CUDA runtime, and hooks into the DSL and torch."""
