"""The commands for people, which the workflow does not run."""

import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from demix.commands.options import Device, Experts, Prior, Tokens, TopK, WeightsRule, terminal
from demix.errors import DemixError

app = typer.Typer()


@app.command(rich_help_panel="Data")
def plan(
    file: Annotated[Path, typer.Argument(help="A config file.")],
    ranks: Annotated[
        int | None, typer.Option(help="Processes that train one model together; default: the config's number.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Hardware of each process: v100 (as in the paper; the default if the config asks for GPUs), a100, "
            "h100, or cpu (the default otherwise)."
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also print tables of models, memory and hours."),
    ] = False,
) -> None:
    """Estimate time, disk and GPU-hours of a config, and warn of what does not fit. Downloads nothing.

    Example: demix plan config/sample.yaml
    """
    from demix.plan.jobs import here_line, in_one_line, runs_here, usual_hardware
    from demix.plan.tables import too_large, training_tables
    from demix.run.check import load_run

    run, console = load_run(file), terminal()
    here, hardware = hardware is None and ranks is None and runs_here(run), hardware or usual_hardware(run)
    tables = training_tables(run, ranks, hardware)
    print(here_line(run, ranks) if here else in_one_line(run, hardware, ranks))
    for line in () if here else too_large(run, ranks, hardware):
        logging.getLogger("demix").warning(f"{file}: {line}")
    if full:
        console.print(*tables)
    else:
        print("demix plan --full prints tables of models, memory and hours.")


@app.command(rich_help_panel="Results")
def summary(run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")]) -> None:
    """Print which model of a finished run is best, its main table, and where to find the other results.

    Example: demix summary results/sample
    """
    from dataclasses import replace

    from demix.report import left_out_notes
    from demix.report.ranking import NOT_BELOW_NGRAMS, main_table, ranking
    from demix.report.run_data import RunData
    from demix.report.table import terminal as printed
    from demix.run.run import Run

    whole = Run.read(run)
    data, console = RunData(whole), terminal()
    found = ranking(data)
    console.print(found.verdict, *found.remarks, "", sep="\n", highlight=False)
    table = main_table(found, found.main)
    narrow = table.frame.filter(regex="domains?$|change|Experts")
    marks = table.beneath.where(table.beneath.isin(["oracle", NOT_BELOW_NGRAMS]), "")
    console.print(printed(replace(table, frame=narrow, beneath=marks)))
    for line in left_out_notes(whole):
        print(line)
    print(f"Tables, figures, claims: {run / 'report'} (start with index.html)")
    print(f"One page with all of it: snakemake --configfile {shlex.quote(f'{run}/config.json')} --report report.html")
    uri = whole.config.tracking.uri
    show = "make ui" if uri == "sqlite:///results/mlflow.db" else "the MLflow store of the config's key tracking.uri"
    print(f"Runs and curves: {show}")


@app.command(rich_help_panel="Results")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders results/<run>; the others are compared with the first.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with all tables to this file.")] = None,
    format: Annotated[Literal["table", "markdown", "json"], typer.Option(help="Format of the output.")] = "table",
) -> None:
    """Print runs side by side: settings that differ, and the main table with intervals.

    Example: demix compare results/sample results/families
    """
    from demix.report.compare import compare as run
    from demix.report.compared import as_json, as_markdown, tables, write_page
    from demix.report.table import terminal as printed

    compared = run(runs)
    if format == "table":
        for table in tables(compared):
            terminal().print(printed(table))
    else:
        print(as_json(compared) if format == "json" else as_markdown(compared))
    if html is not None:
        write_page(compared, html)


@app.command("eval", rich_help_panel="Use")
def evaluate_own(
    model: Annotated[Path, typer.Argument(help="A model directory, results/<run>/models/<model>.")],
    texts: Annotated[
        list[Path],
        typer.Argument(
            metavar="TEXT…",
            help="Text files, files of documents in any format of a domain's source, or folders of such files; - is "
            "standard input. Several files give one table with a line per file.",
        ),
    ],
    tokenizer: Tokens = None,
    field: Annotated[str, typer.Option(help="The field that holds the text, in a file of records.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print which expert's domain is nearest to your own text, and the text's perplexity by expert and mixing method.

    Example: demix eval results/sample/models/demix my.txt
    """
    import json

    from pydantic_core import to_jsonable_python

    from demix.evaluate.own_summary import answer, answers
    from demix.evaluate.own_text import OwnText, evaluate_texts
    from demix.files.json_files import without_nan

    # Reading the text logs the steps of a data stage, which are noise here.
    logging.getLogger("demix").setLevel(logging.WARNING)
    found = list(evaluate_texts(model, texts, tokenizer, field))
    single = len(found) == 1 and not texts[0].is_dir()
    if as_json:

        def as_keys(error: DemixError) -> dict[str, str]:
            return {"text": error.subject, "cause": error.cause, "cure": error.cure}

        printed = without_nan(to_jsonable_python(found, fallback=as_keys))
        print(json.dumps(printed[0] if single else printed, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        for part in answer(found[0]) if single and isinstance(found[0], OwnText) else answers(found):
            terminal().print(part)
    # Files in a folder that are not text are no error; a file that was named by itself must be readable.
    unread = [one for one in found if isinstance(one, DemixError) and Path(one.subject) in texts]
    for one in unread:
        logging.getLogger("demix").error("%s", one)
    if unread:
        raise typer.Exit(1)


@app.command(rich_help_panel="Train")
def merge(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    output: Annotated[Path, typer.Option(help="The directory to write.")],
    weights: Annotated[str | None, typer.Option(help="Weight of each expert: parliament=0.5,novels=0.5.")] = None,
    routed: Annotated[
        bool,
        typer.Option(
            "--routed",
            help="Instead of averaging, merge into a token-routed model: each token uses two experts per layer, chosen "
            "by the routers that experts of kind anchored (FlexOlmo) learned.",
        ),
    ] = False,
) -> None:
    """Merge experts without training: into a dense model (their average) or, if anchored, into a token-routed model.

    Example: demix merge results/sample/models/demix --weights novels=0.5,politics=0.5 --output merged
    """
    from demix.files import refuse_used
    from demix.model.merge import learned_anchored, merge_experts, merge_routed, parse_weights
    from demix.report.card import merged_card

    if routed is (weights is not None):
        raise DemixError("--weights and --routed", "are both given or both missing", "give one of the two options")
    if routed and not learned_anchored(model):
        cure = "merge a model of kind anchored, or train an entry of kind routed with this parent (BTX)"
        raise DemixError(model, "has experts without routers, which --routed needs", cure)
    chosen = parse_weights(weights) if weights is not None else {}
    card = merged_card(model, chosen, output.resolve().name)
    refuse_used(output)
    if routed:
        merge_routed(model, output, card=card)
    else:
        merge_experts(model, chosen, output, card)


@app.command(rich_help_panel="Use")
def generate(
    model: Annotated[Path, typer.Argument(help="A model directory, results/<run>/models/<model>.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    experts: Experts = None,
    weights: WeightsRule = "tempered",
    prior: Prior = "",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, help="Sampling temperature; 0 chooses the likeliest token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Sample only from the likeliest tokens whose total probability is this."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of sampling.")] = 1,
    tokenizer: Tokens = None,
) -> None:
    """Continue a prompt with a mixture of experts. In a terminal, also print the posterior over experts at the end.

    Example: demix generate results/sample/models/demix --prompt "In the beginning"
    """
    from demix.data.readers import SURROGATE
    from demix.generate.terminal import continued, posterior_table
    from demix.model.continuations import mixture_of
    from demix.model.decode import continuation, open_model, use_one_thread

    if SURROGATE.search(prompt):
        raise DemixError("--prompt", "is not UTF-8", "give it in UTF-8")
    names = experts.split(",") if experts else None
    trunks, encoder = open_model(model, names, tokenizer)
    use_one_thread(trunks)
    mixture = mixture_of(model, trunks, encoder, weights, prior)
    decoder = mixture.after(encoder, prompt)
    continued(prompt, continuation(decoder, encoder, tokens, temperature, top_p, seed))
    if sys.stdout.isatty():
        terminal().print(posterior_table(mixture.experts, decoder.posterior.log_weights[0]))


@app.command("serve", rich_help_panel="Use")
def serve_model(
    model: Annotated[Path, typer.Argument(help="A model directory, results/<run>/models/<model>.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; unless loopback, set an API key in DEMIX_API_KEY.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free port.")] = 8502,
    experts: Experts = None,
    weights: WeightsRule = "tempered",
    prior: Prior = "",
    top_k: TopK = None,
    device: Device = None,
    tokenizer: Tokens = None,
) -> None:
    """Serve a mixture of experts: completions with OpenAI's API (/v1/completions, no chat), and a playground page.

    Example: demix serve results/sample/models/demix --port 8501
    """
    from demix.generate.completions import opened
    from demix.generate.server import place_of, serve

    # As in `eval`, the log lines of data stages would be noise.
    logging.getLogger("demix").setLevel(logging.WARNING)
    with place_of(host, port) as place:
        names = experts.split(",") if experts else None
        serve(opened(model, names, weights, prior, top_k, tokenizer, device), place)


experts = typer.Typer(no_args_is_help=True, help="List, check, train, add or remove the experts of a model directory.")
app.add_typer(experts, name="experts", rich_help_panel="Train")
Model = Annotated[Path, typer.Argument(help="A model directory, results/<run>/models/<model>.")]


@experts.command("list")
def experts_list(model: Model) -> None:
    """Show the experts of a model with their lineage, and check every file of the model against its record.

    Prints one line per fault. If there is a fault, the exit status is 1.

    Example: demix experts list results/sample/models/demix
    """
    from rich.table import Table

    from demix.model.directory import describe
    from demix.model.experts import began_with, find_faults, read_experts

    describe(model)
    table = Table(title=f"Experts of {model}")
    for head in ("expert", "parent", "steps", "tokens", "data"):
        table.add_column(head, justify="right" if head in ("steps", "tokens") else "left")
    for name, lineage in read_experts(model).items():
        numbers = ("?" if n is None else f"{n:,}" for n in (lineage and lineage.steps, lineage and lineage.tokens))
        data = ", ".join(lineage.data_sha256) if lineage else ""
        table.add_row(name, (lineage and began_with(lineage)) or "–", *numbers, data or "?")
    terminal().print(table)
    faults = find_faults(model)
    for fault in faults:
        print(fault)
    if faults:
        raise typer.Exit(1)
    print(f"{model}: every file is as recorded")


@experts.command("train")
def experts_train(
    model: Model,
    domain: Annotated[str, typer.Argument(help="The name of the new domain and of its expert.")],
    text: Annotated[
        list[Path],
        typer.Option(help="A file of the domain's text, in any format that `eval` reads; repeat it for more files."),
    ],
    output: Annotated[Path, typer.Option(help="The directory to write: a copy of the model with the new expert.")],
    field: Annotated[str, typer.Option(help="The field that holds the text, in files of records.")] = "text",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of training tokens; default: that of the model's run.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-12,
            help="Peak learning rate; default: as in the model's run, or 1e-4 if demix has not trained the model.",
        ),
    ] = None,
) -> None:
    """Train an expert for a new domain on text files, and print perplexities of held-out text before and after.

    Example: demix experts train results/sample/models/demix letters --text letters.txt --output with-letters
    """
    from rich.table import Table

    from demix.commands.new_domain import add_domain
    from demix.evaluate.own_text import DENSE_OF_RUN

    # Reading the text logs the steps of a data stage, which are noise here.
    logging.getLogger("demix").setLevel(logging.WARNING)
    added = add_domain(model, domain, text, output, field, tokens, learning_rate)
    before, after = added.before, added.after
    table = Table(title=f"{before.tokens:,} tokens of {domain}, held out of training: perplexity", title_justify="left")
    for head in ("", "before", "after"):
        table.add_column(head, justify="right" if head else "left")
    own = next(line.perplexity for line in after.experts if line.name == domain)
    table.add_row("best old expert (oracle), then the new one", f"{before.ranked[0].perplexity:.2f}", f"{own:.2f}")
    values = [{line.name: f"{line.perplexity:.2f}" for line in found.mixtures} for found in (before, after)]
    for name in ("tempered (uniform prior)", DENSE_OF_RUN):
        # A copied model has no dense model next to it; the dense model of the run is the same before and after.
        if name in values[0]:
            table.add_row(name, values[0][name], (values[0] | values[1])[name])
    terminal().print(table)
    peak = f"; peak learning rate {added.learning_rate:g}" if added.learning_rate else ""
    print(f"{output}: {model} with the expert {domain}, which began as {added.begun}{peak}")


@experts.command("add")
def experts_add(
    model: Model,
    expert: Annotated[
        Path,
        typer.Argument(help="OTHER_MODEL/experts/NAME.safetensors of a model with the same shared weights."),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the expert in this model; default: its present name.")
    ] = None,
) -> None:
    """Copy an expert of another model with the same shared weights.

    Example: demix experts add results/sample/models/demix with-letters/experts/letters.safetensors
    """
    from demix.model.experts import add_expert

    print(f"{model}: added {add_expert(model, expert, name)}")


@experts.command("remove")
def experts_remove(model: Model, name: Annotated[str, typer.Argument(help="The expert to remove.")]) -> None:
    """Delete an expert's files.

    Example: demix experts remove with-letters letters
    """
    from demix.model.experts import remove_expert

    remove_expert(model, name)
    print(f"{model}: removed {name}")
