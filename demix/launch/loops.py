"""Errors in finding out how a file is made."""


def end_at_loops() -> None:
    """Let an error in finding out how a file is made end Snakemake, of a file that is there already, too.

    Snakemake by itself warns and takes such a file as it is: the run ends well, with old results.
    """
    from snakemake import dag
    from snakemake.exceptions import RuleException

    def end(error: Exception, *_: object) -> None:
        # Snakemake catches all errors but this one where the file is there.
        raise RuleException(str(error), rule=getattr(error, "rule", None)) from error

    dag.print_exception_warning = end
