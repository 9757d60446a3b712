"""Counters of what an engine has done, for reports and for `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class EngineStats:
    """Counters of the engine, since it was built."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prefilled tokens, those recomputed after a preemption included."""
    generated_tokens: int = 0
    drafted_tokens: int = 0
    """Proposed tokens that steps checked."""
    accepted_tokens: int = 0
    """Those of them that were right."""
    seconds: float = 0.0
    """Wall-clock time of all steps, sampling included."""
    preemptions: int = 0
    """How often a sequence lost its pages to another and was queued again."""
    cancelled: int = 0
    prefix_hits: int = 0
    """Admissions that reused cached tokens, also after a preemption."""
    reused_tokens: int = 0
    """Tokens that were found in the prefix cache and not computed."""
    state_snapshots: int = 0
    """Snapshots taken of recurrent states."""
    most_pages: int = 0
    """Largest number of cache pages in use at once."""
    pages: int = 0
    """Number of cache pages."""
    graph_replays: int = 0
    """Steps that replayed a CUDA graph."""
    steps_ahead: int = 0
    """Steps launched before the tokens of the step before had arrived."""
    dropped_tokens: int = 0
    """Tokens of such steps that were dropped: their request had finished a step earlier."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def cache(self) -> dict[str, int]:
        """Return the counters of the cache."""
        names = (
            "preemptions",
            "prefix_hits",
            "reused_tokens",
            "state_snapshots",
            "most_pages",
            "pages",
        )
        return {name: getattr(self, name) for name in names}

    def cache_line(self) -> str:
        """Return the counters of the cache as one line of text."""
        return (
            f"at most {self.most_pages} of {self.pages} cache pages in use, {self.preemptions} preemptions, "
            f"{self.reused_tokens} tokens reused from {self.prefix_hits} known prefixes"
        )

    def draft_line(self) -> str | None:
        """Return what came of drafts as one line of text; None if there were none."""
        if not self.drafted_tokens:
            return None
        right = f"{self.accepted_tokens} of {self.drafted_tokens} drafted tokens were right"
        return f"{right}; {self.generated_tokens} tokens in {self.steps} steps"

    def as_dict(self) -> dict[str, float]:
        """Return all figures, for reports."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}
