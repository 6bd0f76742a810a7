"""What compare_methods.py compares: rival methods, tasks, the plan of the runs, and the pages made from their rows."""
