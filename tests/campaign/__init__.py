"""Runs of real networks, runtimes and versions: a table of cases, a row of results for each.

A campaign is a `Campaign` in a module of `__main__.CAMPAIGNS`: the names of its cases, the module that runs one, and the
page of its results. `python -m tests.campaign NAME` runs the cases that have no row yet, each in a process of its own with
a limit of time, and keeps each row at once: a run that was stopped goes on where it was.
"""
