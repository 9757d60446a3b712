"""The committed coverage is one that this version reads, and its document and picture were made of
it.
"""

from __future__ import annotations

from onboard.content import CONTENT_ROOT
from onboard.verify.tolerances import SAME
from onboard.workflow.phases import PHASES
from onboard.workflow.sweep.coverage import PATH, Coverage, ordered
from onboard.workflow.sweep.coverage_document import DOCUMENT, PICTURE, document, picture
from onboard.workflow.sweep.target_record import LEVELS, TESTED


def test_document_and_picture_are_of_the_committed_coverage() -> None:
    coverage = Coverage.model_validate_json((CONTENT_ROOT / PATH).read_text(encoding="utf-8"))
    assert coverage.entries == ordered(coverage.entries)
    assert (CONTENT_ROOT / DOCUMENT).read_text(encoding="utf-8") == document(coverage)
    assert (CONTENT_ROOT / PICTURE).read_text(encoding="utf-8") == picture(coverage)


def test_every_committed_pass_was_measured() -> None:
    coverage = Coverage.model_validate_json((CONTENT_ROOT / PATH).read_text(encoding="utf-8"))
    for entry in coverage.entries:
        if entry.status == "pass":
            assert entry.levels == dict.fromkeys(LEVELS, "passed"), entry.type
            assert entry.errors.keys() == set(TESTED), entry.type
            assert coverage.device != "cpu" or max(entry.errors.values()) <= SAME, entry.type
            assert entry.phases == dict.fromkeys(PHASES, "done"), entry.type
            assert entry.exit_code == 0, entry.type
            assert entry.verdict is not None, entry.type
            assert entry.verdict.agrees, entry.type
        else:
            assert entry.reason, entry.type
