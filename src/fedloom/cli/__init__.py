# SPDX-License-Identifier: Apache-2.0
"""The command line: argument text -> api calls -> text.

Nothing heavy is imported here: commands import what they need when they run, so that help comes at once.
"""
