"""The tables, figures and pages of a report, in their order.

Each is made from a `RunData` by the function of the same name in one of these modules; the function's docstring is the
caption. The modules load pandas and altair. This list does not load the modules, since the workflow reads it to know
the files of a report.
"""

from demix.report import needs
from demix.report.item import FigureItem, Item, PageItem, TableItem

NOVEL, CLUSTERS = (needs.NOVEL,), (needs.CLUSTERS,)
ITEMS: tuple[Item, ...] = (
    TableItem("paper", "table1", "Table  1: the corpus"),
    TableItem("paper", "table2", "Table  2: size and cost of the models"),
    TableItem("paper", "table3", "Table  3: perplexity on the training domains"),
    TableItem("paper", "table4", "Table  4: perplexity by training domain"),
    TableItem("paper", "table5", "Table  5: perplexity on the novel domains", NOVEL),
    TableItem("paper", "table6", "Table  6: adding experts", NOVEL),
    TableItem("paper", "table7", "Table  7: removing experts", (needs.SECOND_TRAINING,)),
    TableItem("paper", "table13", "Table 13: adapting to a novel domain, and forgetting", NOVEL),
    TableItem("further", "ablations", "Ablations: mixing rules, priors, number of experts, temperature"),
    TableItem("further", "tasks", "Classification tasks, benchmarks and suites", (needs.ANY_TASK,)),
    TableItem("families", "families", "All models: mean test perplexity"),
    FigureItem("figures", "figure2", "Figure 2: how well each expert predicts each domain, and shared bigrams"),
    FigureItem("figures", "figure4", "Figure 4: how the cached prior weights the experts for each domain"),
    FigureItem("figures", "figure6", "Figure 6: adapting to a novel domain with and without forgetting", NOVEL),
    FigureItem("figures", "figure7", "Figure 7: the posterior over experts, block by block, on the training domains"),
    FigureItem(
        "figures", "figure8", "Figure 8: the posterior over experts, block by block, on the novel domains", NOVEL
    ),
    FigureItem("figures", "training", "Loss of each model during training"),
    FigureItem("families", "by_clusters", "Perplexity by the number of clusters", CLUSTERS),
    FigureItem(
        "families",
        "cluster_experts",
        "Perplexity of each cluster's expert on each cluster, and the clusters of each domain",
        CLUSTERS,
    ),
    FigureItem("families", "cluster_sizes", "Sizes of the clusters, in test documents", CLUSTERS),
    PageItem(
        "pages",
        "claims",
        "Claims of the papers and of this project, judged on this run",
        formats=(("html", "HTML"), ("md", "")),
        category="Claims",
    ),
    PageItem("pages", "index", "The run on one page", category="At a glance"),
)
