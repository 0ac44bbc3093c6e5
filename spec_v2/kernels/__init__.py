"""One folder per operation: contract and dispatch, reference in plain torch, kernel.

`__init__.py` says what goes in and comes out, and chooses: the Triton kernel for CUDA tensors, the reference
elsewhere. `reference.py` is the meaning. `triton_kernel.py` is the same function, fast; it is imported at the first
call that needs it. Every kernel can be captured in a CUDA graph: grids and shapes are host knowledge, nothing waits
for the device, and the outputs are the only allocations.

Kernels carry `@no_type_check` below `@triton.jit`: the hook that checks shapes under pytest would otherwise wrap the
function, and Triton's compiler would then look for its names in the wrapper's module. Loops whose bounds are known at
run time only are `while` loops: the interpreter of Triton 3.6 cannot take a `range` of them under numpy 2.4. Attention
has a `for` over a range all the same: Triton loads ahead in no other loop.
"""
