"""Operators of torch that the compiler takes as a whole."""

from collections.abc import Callable
from typing import Any

import torch


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function of tensors, which changes none of its inputs, the operator `demix::<name>`.

    `fake` returns empty tensors of the shapes and types that the function returns.

    `torch.library.custom_op` does the same, but it imports torch's compiler at the first call, which takes over a
    second of the start of each training.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        called = f"demix::{name}"
        torch.library.define(called, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(called, "default")(function)
        torch.library.register_fake(called, fake)
        operator: Callable[..., Any] = getattr(torch.ops.demix, name).default
        return operator

    return register
