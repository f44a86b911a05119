"""Instructions: one intrinsic is one PTX instruction with a GPU body and a Python body."""
