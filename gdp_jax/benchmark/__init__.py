"""Times the operators on named cases, `python -m gdp_jax.benchmark`, and searches block sizes.

Nothing is timed before it was compared with the recurrence. Kernel times are read from the GPU's
own counters, so that launches are not in them; wall time is what a caller waits for. Peers run in
the same process or, if they are PyTorch's, in others while this one waits.

B batch, T tokens, M Householder copies, H query/key heads, HV value heads, K and V head dims.
"""
