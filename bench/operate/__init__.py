"""What looking costs: the dashboard's pages with a long history, the help text, metrics beside a pipeline without.

past ─▶ pages     a dashboard process, a browser    ─┐
        help      `sluice --help`                   ─┼─▶ measure
        overhead  metrics scraped │ no metrics      ─┘
"""
