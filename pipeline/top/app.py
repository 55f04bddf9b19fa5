"""The screen of `sluice top`: the head stays on top; below it is one of four pages, scrolled with the arrow keys."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Footer, Static, Tab, Tabs

from sluice.pipeline.config import Config
from sluice.pipeline.top import panels
from sluice.pipeline.top.panels import Feed

_EVERY_S = 1.0
_PAGES = {
    "stages": panels.stage_rows, "processes": panels.process_rows, "why": panels.why, "letters": panels.letter_rows,
}  # fmt: skip
_TITLES = {"stages": "stages", "processes": "processes", "why": "why", "letters": "dead letters"}
_HELP = """\
sluice top: one run, refreshed once a second, read-only.

  tab, right    next page          shift+tab, left  page before
  up, down      scroll             page up, page down
  ?             this help          q                quit

stages        each stage of the flow: what it does, or what it waits for
processes     what each process reports
why           what blocks the run, since when, and what to do
dead letters  the newest sequences that failed for good

`sluice status --why` prints the same as text. Any key closes this help."""


class Help(ModalScreen[None]):
    """The key bindings."""

    def compose(self) -> ComposeResult:
        """One box."""
        yield Static(_HELP, id="help", markup=False)

    def on_key(self) -> None:
        """Any key closes it."""
        self.dismiss()


class TopApp(App[None]):
    """Shows the state that `Feed` reads."""

    CSS = """
    Screen { background: ansi_default; }
    #head { height: auto; padding: 0 1; }
    #pages { height: 1fr; }
    VerticalScroll { padding: 0 1; scrollbar-size-vertical: 1; }
    Help { align: center middle; }
    #help { width: 76; height: auto; border: round $primary; padding: 0 1; background: $surface; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "help", "help"),
        Binding("tab", "turn(1)", "next page", priority=True),
        Binding("right", "turn(1)", show=False, priority=True),
        Binding("shift+tab,left", "turn(-1)", show=False, priority=True),
        Binding("up,down", "", "scroll"),
    ]

    def __init__(self, config: Config, every_s: float = _EVERY_S) -> None:
        super().__init__(ansi_color=True)
        self._config, self._every_s = config, every_s
        self._feed: Feed | None = None

    def compose(self) -> ComposeResult:
        """Head, names of the pages, pages, keys."""
        yield Static("looking …", id="head", markup=False)
        tabs = Tabs(*(Tab(title, id=f"tab-{name}") for name, title in _TITLES.items()))
        tabs.can_focus = False
        yield tabs
        with ContentSwitcher(initial="stages", id="pages"):
            for name in _PAGES:
                with VerticalScroll(id=name):
                    yield Static("", id=f"{name}-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Start polling; textual ends the task with the app."""
        self.query_one("#stages").focus()
        self.run_worker(self._keep_looking(), exclusive=True)

    async def _keep_looking(self) -> None:
        self._feed = Feed(self._config)
        try:
            while True:
                view = await self._feed.look()
                self.query_one("#head", Static).update(panels.head(view))
                for name, part in _PAGES.items():
                    self.query_one(f"#{name}-text", Static).update(part(view))
                await asyncio.sleep(self._every_s)
        finally:
            await self._feed.close()

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        """Page selected by mouse or key."""
        name = str(event.tab.id).removeprefix("tab-")
        self.query_one("#pages", ContentSwitcher).current = name
        self.query_one(f"#{name}").focus()

    def action_turn(self, step: int) -> None:
        """Next or previous page."""
        tabs, names = self.query_one(Tabs), list(_PAGES)
        at = names.index(str(tabs.active).removeprefix("tab-"))
        tabs.active = f"tab-{names[(at + step) % len(names)]}"

    def action_help(self) -> None:
        """Show the key bindings."""
        self.push_screen(Help())
