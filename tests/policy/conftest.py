from hypothesis import settings

settings.register_profile("policy", deadline=None)  # how long an example takes says nothing about a rule
settings.load_profile("policy")
