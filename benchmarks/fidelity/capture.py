"""x, g and W of living linear layers in one backward."""

from __future__ import annotations

from torch import Tensor, nn


def capture(model: nn.Module, batch: dict[str, Tensor], names: list[str]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Run one exact forward and backward.

    Args:
        batch: arguments of ``model``, labels included.
        names: full names of linear layers.

    Returns:
        by name: x (tokens, in_features), g (tokens, out_features) and W (out_features, in_features), float32.
    """
    kept: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    handles = []
    for name in names:
        layer, entry = model.get_submodule(name), kept[name]

        def hook(module, args, output, entry=entry):
            entry["x"] = args[0].detach().flatten(0, -2).clone()
            output.register_hook(lambda g, entry=entry: entry.update(g=g.detach().flatten(0, -2).clone()))

        handles.append(layer.register_forward_hook(hook))
    try:
        model.train()
        model(**batch).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    captured = {name: (e["x"], e["g"], model.get_submodule(name).weight.detach().clone()) for name, e in kept.items()}
    model.zero_grad(set_to_none=True)
    return captured
