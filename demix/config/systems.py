"""What the models of a run are: the one table that rules, plan, evaluation, report and tracking read."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """How models of one kind are built and what they learn from.

    `expert_scope` says which tensors belong to a domain's expert alone: `feedforward` (DEMix layers), or `none` for a
    model whose one expert is called `dense`. `batches` says how a step is drawn: `by_domain` (a group of sequences for
    each domain's expert), `mixed` (the same sequences as one group) or `proportional` (to the domains' sizes).
    `domain_tokens`: a domain's token stands before each sequence.
    """

    name: str
    expert_scope: str
    batches: str
    domain_tokens: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("demix", "feedforward", "by_domain"),
        Kind("dense", "none", "mixed"),
        Kind("dense_unbalanced", "none", "proportional"),
        Kind("domain_token", "none", "mixed", domain_tokens=True),
    )
}
