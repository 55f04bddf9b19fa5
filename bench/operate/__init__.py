"""What looking costs: the dashboard's pages with a long history, the help text, metrics beside a pipeline without."""
