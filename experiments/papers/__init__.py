"""What the papers compare with and train, on torch: other forms of attention, tasks and a model.

Importing a module of this package imports torch, unless it says otherwise.
"""
