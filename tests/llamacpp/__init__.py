"""llama.cpp's own server tests, run from the pinned source against our engine and the unpatched one."""
