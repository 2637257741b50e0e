"""A site that loses a node a minute and has no spare: how far does a training get?"""
