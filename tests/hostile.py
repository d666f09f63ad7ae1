# SPDX-License-Identifier: Apache-2.0
"""Names that somebody could give a client to break a page."""

HOSTILE = [
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "</script><script>window.hacked=1</script>",
    "x" * 300,
    "\u202egnp.exe",
    "مستشفى",
    "a'b\"c`d",
    "${window.hacked=1}",
    "{{7*7}}",
    "two\u2028lines",
    "=cmd|' /C'!A0",
    "]]>",
    "--><b>",
    "\x01\x07",
    "picked",
    "datum.client",
]
