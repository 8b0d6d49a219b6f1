"""`torchring run`: starts a script on several processes, of this host or of several. Nothing here imports torch,
apart from the agent."""
