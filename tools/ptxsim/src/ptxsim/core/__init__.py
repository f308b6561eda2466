"""What translated PTX runs on: values, memories, warps, barriers, asynchronous units."""
