"""The tables, figures and pages of a report, in their order.

Each is made from a `RunData` by the function of its name in one of these modules, whose docstring is the caption. The
modules load pandas and altair; this list of them does not, since the workflow asks what files a report has.
"""

from demix.report import needs
from demix.report.item import FigureItem, Group, Item, PageItem, TableItem

PAPER, FURTHER, FIGURES, FAMILIES = Group.PAPER, Group.FURTHER, Group.FIGURES, Group.FAMILIES
NOVEL, CLUSTERS = (needs.NOVEL,), (needs.CLUSTERS,)
ITEMS: tuple[Item, ...] = (
    TableItem("paper", "table1", "Table  1: the corpus", PAPER),
    TableItem("paper", "table2", "Table  2: size and cost of the models", PAPER),
    TableItem("paper", "table3", "Table  3: perplexity on the training domains", PAPER),
    TableItem("paper", "table4", "Table  4: perplexity by training domain", PAPER),
    TableItem("paper", "table5", "Table  5: perplexity on the novel domains", PAPER, NOVEL),
    TableItem("paper", "table6", "Table  6: adding experts", PAPER, NOVEL),
    TableItem("paper", "table7", "Table  7: removing experts", PAPER, (needs.SECOND_TRAINING,)),
    TableItem("paper", "table13", "Table 13: adapting to a novel domain, and forgetting", PAPER, NOVEL),
    TableItem("further", "ablations", "Ablations: rules of weights, priors, number of experts, temperature", FURTHER),
    TableItem("further", "tasks", "Classification tasks, benchmarks and suites", FURTHER, (needs.ANY_TASK,)),
    TableItem("families", "families", "All models: perplexity at equal tokens", FAMILIES),
    FigureItem(
        "figures",
        "figure2",
        "Figure 2: how well each expert predicts each domain, and the bigrams that they share",
        FIGURES,
    ),
    FigureItem("figures", "figure4", "Figure 4: which experts the cached prior chooses for each domain", FIGURES),
    FigureItem(
        "figures", "figure6", "Figure 6: adapting to a novel domain with and without forgetting", FIGURES, NOVEL
    ),
    FigureItem(
        "figures", "figure7", "Figure 7: the posterior over experts, block by block, on the training domains", FIGURES
    ),
    FigureItem(
        "figures",
        "figure8",
        "Figure 8: the posterior over experts, block by block, on the novel domains",
        FIGURES,
        NOVEL,
    ),
    FigureItem("figures", "training", "Loss of each model in training", FIGURES),
    FigureItem("families", "by_clusters", "Perplexity by the number of clusters", FAMILIES, CLUSTERS),
    FigureItem(
        "families",
        "cluster_experts",
        "Experts of clusters on clusters, and clusters against domains",
        FAMILIES,
        CLUSTERS,
    ),
    PageItem(
        "pages",
        "claims",
        "Claims of the paper, judged on this run",
        formats=(("html", "HTML"), ("md", "")),
        category="Claims",
    ),
    PageItem("pages", "index", "The run on one page", category="At a glance"),
)
