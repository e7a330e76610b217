"""What a step that is known on paper holds, sends and takes on devices, by each way of spreading it
over them, and which way is advised.
"""
