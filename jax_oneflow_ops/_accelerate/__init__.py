"""How `accelerate` swaps operations of unchanged programs, and how `explain` reports it.

- `rules` installs the new lowering rules and opens scopes. `scatters` has the rule of scatters.
  `common` has what all rules ask first.
- Most other modules recognise a pattern in the program, know whether it pays to replace it, and
  emit what replaces it: `gathers` (sums and dot products of gathered rows), `grids` (sums along two
  axes), `searches`, `exp_sums`, `softmaxes`, `dot_attention` with `dot_attention_search` and
  `symbols`, `products` (matrix products to pad), `convolutions`, `pooling`, `chains`.
- `explanation` collects what rules did, `explain` adds what they did not do, and `report` prints
  both. `tune` times programs.
"""
