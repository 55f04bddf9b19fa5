"""The run in a browser: server-rendered pages, kept fresh by server-sent events.

    broker ──inspect, once a second──▶ Monitor ──▶ pages (Jinja2) ──────▶ browser
                                        ▲   └────▶ Live fragments ──/events─▲ │
    history ── reader, index, curves ───┘   └────▶ JSON of curves ──/curves─┘ uPlot

- `app`: the process, its middleware, and who has access; `monitor`: the newest state of the run.
- Pages: `overview`, `sequences` (with `tokens`, `outcome` and `picture`), `jobs`, `workers`, `dead_letters`,
  `runs` (also of a fleet). `render` builds them and keeps them fresh; static/charts.js draws curves.
- Read-only, unless actions are allowed; then dead letters can be replayed and dropped.
- Nothing is loaded from another host, no script or style is inline, and every page works without scripts.
- Displayed ids, texts and tracebacks come from others: they are escaped, bounded, and never trusted.
"""
