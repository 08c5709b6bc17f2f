"""Fleets: every registered model that the policies are meant for, taken through the stage as one piece of work.

`selection` finds the versions and the policies; `journal` keeps them, and what became of each, in a database;
`scheduler` decides what runs next, without a clock or a disk; `driving` puts both to work on an executor (`local`,
`on_ray`); `outcomes` reads what a run left, and `document` makes the fleet's report of it. `simulation` drives the same
code with tasks that only take time.
"""
