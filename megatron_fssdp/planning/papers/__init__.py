"""The placement algorithms of the papers: Hecate, FasterMoE, Pro-Prophet, SmartMoE and FlexMoE."""
