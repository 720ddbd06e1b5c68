"""What the tests of ranks compare."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gather_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, whole on every rank, whether the model is sharded or not."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
