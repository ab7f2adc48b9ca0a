"""The gradient of a max-pooling whose windows do not overlap: a pixel needs to look at one window only.

As with products, it is put into programs that are already traced.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.fx import GraphModule

aten = torch.ops.aten


@torch.library.custom_op("fedloom::unpool", mutates_args=())
def unpool(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    """Gradients g (n, c, p, q) where they belong in images (n, c, *size): at the `places` of the largest pixels."""
    if g.is_cuda and find_spec("triton") is not None:
        from fedloom.kernels import pooling_triton  # there where torch comes with CUDA

        return pooling_triton.unpool(g.contiguous(), places.contiguous(), size, kernel)
    images = g.new_zeros(*g.shape[:2], size[0] * size[1])
    return images.scatter(2, places.flatten(2), g.flatten(2)).unflatten(2, size)


@unpool.register_fake
def _(g: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    return g.new_empty(*g.shape[:2], *size)


def replace_pooling(program: GraphModule) -> None:
    for node in program.graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default):
        g, x, kernel, stride, padding, dilation, _, places = node.args
        image = x.meta["val"]
        if (
            list(stride or kernel) == list(kernel)
            and not any(padding)
            and set(dilation) == {1}
            and image.is_contiguous()
        ):
            node.target = torch.ops.fedloom.unpool.default
            node.args = (g, places, list(image.shape[2:]), list(kernel))
    program.recompile()
