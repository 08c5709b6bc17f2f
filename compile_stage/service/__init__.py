"""`compile-stage watch`: a service that runs the stage when the registry says that a model was promoted.

A delivery of MLflow's webhook is checked (`deliveries`) and written to the durable queue (`queue`) before it is
answered. `deciding` then looks at the version as it is now and adds the runs that the folder of policies asks for, one
for each version and policy; `polling` finds what no delivery reported. `runs` starts each as a process of its own
(`attempt`), so that nothing that happens in a run can end the service. `app`, `pages` and `metrics` show all of it.
"""
