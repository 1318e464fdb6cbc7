"""A small mixture-of-experts language model, trained twice: the whole way from bytes to a falling loss.

    python -m examples.moe_jax      JAX, experts through `cupy_gmm.jax.ragged_dot`, one jitted step
    python -m examples.moe_xp       CuPy or NumPy, experts through `cupy_gmm.expert_ffn`, backward pass by hand

Both train the same model on the sources of Python's standard library, which every machine with Python has: a byte is
a token; each layer is causal attention and an expert layer, both behind a norm and beside a residual. Parameters are
float32, operands of the experts' products bfloat16. Without a GPU a tiny model is trained, in a few minutes.
With CuPy, `CUPY_TF32=1` takes the tensor cores for float32 products too, as JAX does by itself. The extra `cli`
brings what both print and draw with.

`model.py` says what the model is: sizes, first parameters, learning rate. `data.py` has the text, `training.py` the
loop and the options, `records.py` what a run leaves behind: checkpoint, losses, expert counts, picture.
"""
