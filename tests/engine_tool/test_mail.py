"""Patch mails: what they touch, what they claim, and finishing them the same way every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.errors import EngineToolError
from proxy.engine.mail import AUTHOR, Touch, diff_touches, normalise, parse_mail, slug, stated_touches

HEAD = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: {AUTHOR}
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] Hold a subject that is so long
 that git folds it
"""
DIFF = """\
diff --git a/a.c b/a.c
index 1..2 100644
--- a/a.c
+++ b/a.c
@@ -1,3 +1,3 @@
 one
--- a line that looks like a header
++++ another one
 three
@@ -9 +9,2 @@ int f()
 nine
+ten
\\ No newline at end of file
diff --git a/new.h b/new.h
new file mode 100644
index 0..3
--- /dev/null
+++ b/new.h
@@ -0,0 +1 @@
+#pragma once
"""
TOUCHES = (Touch("a.c", 2, 1), Touch("new.h", 1, 0))


def mail_text(message: str, diff: str = DIFF) -> str:
    return f"{HEAD}\n{message}\n\n{diff}"


def test_reads_subject_trailers_and_touches() -> None:
    mail = parse_mail("x", mail_text("Prose.\n\nPatch-Name: x\nForwarded: no\nCore-Touch: a.c +2/-1"))
    assert mail.subject == "Hold a subject that is so long that git folds it"
    assert mail.trailer("Forwarded") == ("no",)
    assert mail.touches == TOUCHES
    assert stated_touches(mail) == (Touch("a.c", 2, 1),)


def test_prose_with_a_colon_is_no_trailer_block() -> None:
    mail = parse_mail("x", mail_text("Note: this is prose\nand goes on here"))
    assert mail.trailers == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "format-patch"),
        (HEAD + "\nno diff at all\n", "no diff"),
        (mail_text("m", DIFF.replace("b/a.c\nindex", "b/b.c\nindex")), "renames"),
        (
            mail_text("m", DIFF.replace("@@ -9 +9,2 @@", "@@ -9,8 +9,9 @@").split("diff --git a/new")[0]),
            "cut short",
        ),
        (mail_text("m", "diff --git a/x b/x\nGIT binary patch\nliteral 1\n"), "binary"),
    ],
)
def test_refuses_what_it_cannot_count(text: str, message: str) -> None:
    with pytest.raises(EngineToolError, match=message):
        parse_mail("x", text)


def test_a_wrong_core_touch_line_is_named() -> None:
    mail = parse_mail("x.patch", mail_text("Core-Touch: a.c 2 lines"))
    with pytest.raises(EngineToolError, match=r"x\.patch.*a\.c 2 lines"):
        stated_touches(mail)


def test_normalise_writes_true_trailers_and_the_fixed_author() -> None:
    text = mail_text("Why.\n\nForwarded: no\nCore-Touch: a.c +99/-99").replace(
        AUTHOR, "Dev <dev@example.org>"
    )
    name, out = normalise(text)
    mail = parse_mail("out", out)
    assert name == slug("Hold a subject that is so long that git folds it")
    assert "dev@example.org" not in out
    assert stated_touches(mail) == TOUCHES
    assert mail.trailer("Forwarded") == ("no",)
    assert mail.trailer("Patch-Name") == (name,)
    assert mail.diff == DIFF


@pytest.mark.parametrize(
    "message", ["", "Prose only.", "Patch-Name: given", "A.\n\nB.\n\nPatch-Name: given\nX-Y: z"]
)
def test_normalise_is_idempotent(message: str) -> None:
    name, once = normalise(mail_text(message))
    assert normalise(once) == (name, once)


LINE = st.text(alphabet="ab+-\\@ ", max_size=12)


@given(st.lists(st.tuples(st.sampled_from("+- "), LINE), min_size=1, max_size=30))
def test_counts_any_hunk_body(body: list[tuple[str, str]]) -> None:
    """Whatever the lines look like, counts follow the hunk header and not the look of the lines."""
    added = sum(sign == "+" for sign, _ in body)
    removed = sum(sign == "-" for sign, _ in body)
    same = len(body) - added - removed
    hunk = f"@@ -1,{same + removed} +1,{same + added} @@\n" + "".join(
        f"{sign}{text}\n" for sign, text in body
    )
    diff = f"diff --git a/f b/f\n--- a/f\n+++ b/f\n{hunk}"
    assert diff_touches("x", diff) == (Touch("f", added, removed),)


@given(st.text(max_size=80))
def test_slug_is_a_plain_file_name(text: str) -> None:
    made = slug(text)
    assert made
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not made.startswith("-")
    assert len(made) <= 48
