"""A training step's shape (train.step_memory) without the weights around it."""

from typing import Any

from train.step_memory import Shape


def bare_shape(
    fields: dict[str, Any],
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
    length: int,
    states_bytes: int = 4,
) -> Shape:
    """One row of fp32 states on a CPU; of the result only `work` means something."""
    return Shape(
        fields=fields,
        aux_layers=aux_layers,
        draft_vocab_size=draft_vocab_size,
        num_parameters=0,
        num_trained=0,
        target_parameters=0,
        held_parameters=0,
        target_bytes=4,
        states_bytes=states_bytes,
        num_rows=1,
        length=length,
    )
