"""Strategies that papers describe: FasterMoE, FlexMoE, Pro-Prophet and SmartMoE."""
