"""Kernels on a CPU: what triton-ascend's front end makes of them, compiled to native code.

=============  ===================================================================================
module         what it does
=============  ===================================================================================
``library``    bodies of the functions that the front end leaves to the device's library
``lowering``   linalg dialect to LLVM IR: fusion, buffers, loops
``native``     LLVM IR to machine code, kept on disk
``backend``    launches: binds arguments, spreads the grid over threads
=============  ===================================================================================

So the numbers of a kernel are those of the very intermediate code that the Ascend compiler is
given; what that compiler does to it afterwards (tiling, synchronisation, memory planning) is not
exercised here.
"""
