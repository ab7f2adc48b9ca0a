"""The graph passes that put custom operators into the traced step of stacked clients on a GPU."""

from torch.fx import GraphModule

from fedloom.nn.kernels import dispatch
from fedloom.nn.kernels.channel_sum import replace_channel_sums
from fedloom.nn.kernels.matmul import replace_matmuls
from fedloom.nn.kernels.pooling import replace_pooling


def insert_kernels(module: GraphModule, compiled: bool = False) -> None:
    """Replace operations by custom kernels where they are faster. In a graph that torch's compiler will fuse, only
    matrix products are replaced."""
    if not dispatch.TRITON:
        return
    replace_matmuls(module)
    if not compiled:
        replace_pooling(module)
        replace_channel_sums(module)
