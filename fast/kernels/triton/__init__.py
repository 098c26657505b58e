"""The Triton kernels, one module an operation, named as the torch operations beside them.

One source serves every backend of `servespec.fast.backends`, so it keeps to what triton-ascend
3.2 and upstream Triton from 3.6 on both have: plain pointers with masks, ranges of powers of two,
values widened to float32 as soon as they are loaded, no block pointers, descriptors, ``argmax``
nor results of atomic operations. Importing a module here imports Triton; nothing of the plain
installation does.

Each launcher takes the backend first, then torch tensors whose last axis is contiguous.
"""
