"""Programs as people write them: none of them imports this package.

Each module has `program(**sizes)`, which returns a step of training and its arguments: parameters,
the optimizer's state and a batch. The step returns new ones of the former two and the loss.
"""
