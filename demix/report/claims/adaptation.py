"""Claims about the adaptation to novel domains."""

from collections.abc import Iterator
from functools import partial

from demix.progress import so_many
from demix.report.claims.row import Row, Versus
from demix.report.material import Material
from demix.report.needs import NOVEL
from demix.report.systems import before_adding, before_dense_dapt, dense_adapted, one_added
from demix.report.verdict import UNCHANGED, Part, as_percent, compare
from demix.run.main_systems import added


def _parent(material: Material) -> str:
    return "the likeliest training expert" if material.averaged else "its parent"


def _adapts(material: Material) -> Iterator[Part]:
    """The new experts against their parents, and the training domains before and after."""
    import pandas as pd

    results, novel = material.results, material.novel
    (naive, _), (all_naive, _) = before_adding(material.run), added(material.run)
    likeliest = {
        name: results.expert_perplexities(naive.model, name, [material.parents[name].likeliest]).iloc[0]
        for name in novel
        if name in material.parents
    }
    parents = pd.Series(likeliest, index=novel, dtype="float64")
    yield compare("Adapted expert", results.perplexities(all_naive, novel), _parent(material), parents)
    before, after = (results.perplexities(one, material.training) for one in (naive, all_naive))
    change = (after / before - 1).abs().dropna()
    agreeing = int((change <= UNCHANGED).sum())
    sentence = (
        f"Training domains by their own experts: unchanged on {agreeing} of {len(change)}, by construction "
        f"(largest change {100 * change.max():.3g}%)."
        if len(change)
        else "Training domains by their own experts: no rows."
    )
    yield Part(bool(len(change)) and agreeing == len(change), agreeing, len(change), sentence)


def _forgets(material: Material) -> Iterator[Part]:
    """The mean over the training domains after each Dense-DAPT, against that before."""
    import pandas as pd

    results, training = material.results, material.training
    start, after = before_dense_dapt(material.run), dense_adapted(material.run)
    dense = results.perplexities(start, training)
    adapted = pd.DataFrame(
        {name: results.perplexities(after(name), training) for name in material.novel}, index=training
    ).dropna(axis="columns")
    changes = adapted.mean() / dense.mean() - 1 if dense.notna().all() else pd.Series(dtype="float64")
    if changes.empty:
        yield Part(False, 0, 0, f"Dense-DAPT against {start.label}: no rows.")
        return
    agreeing = int((changes > 0).sum())
    yield Part(
        bool(changes.mean() > 0),
        agreeing,
        len(changes),
        f"Dense-DAPT changes the mean perplexity of the training domains by {as_percent(changes.mean())} on "
        f"average ({as_percent(changes.min())} to {as_percent(changes.max())}), a rise for {agreeing} of "
        f"{so_many(len(changes), 'novel domain')}.",
    )


def _one_reduces(material: Material) -> Iterator[Part]:
    """Each novel domain's expert alone added to the training experts: the mean over the training domains."""
    import pandas as pd

    results, training, novel = material.results, material.training, material.novel
    means = {name: results.mean(one_added(material.run)(name), training) for name in novel}
    base = results.mean(before_adding(material.run)[1], training)
    yield compare(
        "With one more expert, averaged over the training domains,",
        pd.Series(means, dtype="float64"),
        "training experts",
        pd.Series(base, index=novel, dtype="float64"),
        over="added expert",
    )


_row = partial(Row, needs=(NOVEL,))
ROWS = (
    _row(
        "demix_dapt",
        lambda material: (
            f"DEMix-DAPT adapts without forgetting: the new expert beats {_parent(material)} on the new domain, and "
            "the training domains stay as they were"
        ),
        "Figure 6, Table 13",
        _adapts,
        remark=lambda material: (
            " Here the new expert began as the average of all training experts, by posterior." * material.averaged
        ),
    ),
    _row(
        "demix_dapt_against_dense_dapt",
        "On the domain adapted to, DEMix-DAPT (the training experts and the new one, cached prior) has lower "
        "perplexity than Dense-DAPT",
        "6.2, Figure 6",
        lambda material: [
            Versus(one_added(material.run), dense_adapted(material.run), "novel", ("DEMix-DAPT", "Dense-DAPT"))
        ],
    ),
    _row(
        "dense_dapt_forgets",
        "Dense-DAPT forgets: adapting all parameters to a novel domain raises perplexity on the training domains",
        "Figure 6, Table 13",
        _forgets,
    ),
    _row(
        "one_added_expert_reduces",
        "Adding one adapted expert to the mixture lowers perplexity on the training domains too",
        "6.2, Figure 6",
        _one_reduces,
    ),
)
