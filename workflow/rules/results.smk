# What snakemake prints last: the results of the run.
import atexit
import sys

from snakemake.common import NOTHING_TO_BE_DONE_MSG


def tell_results():
    """Print what `demix summary` prints or, where targets were named, where the files are."""
    from demix.commands.people import summary

    try:
        if any(target.name == "all" for target in workflow.dag.targetrules):
            summary(Path(RUN))
        else:
            print(f"The files are in {RUN}")
    except DemixError as error:
        # A run that has ended well stays one.
        print(f"demix summary {RUN}: {error}", file=sys.stderr)


def tell_of_nothing_to_do(record):
    """Snakemake calls no handler of a run that had nothing to do: its message is one."""
    if record.msg == NOTHING_TO_BE_DONE_MSG and workflow.is_main_process and not workflow.dryrun:
        atexit.register(tell_results)
    return True


logger.addFilter(tell_of_nothing_to_do)
