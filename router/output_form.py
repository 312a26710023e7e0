"""What one body asks of its output's form, decided and checked: its grammar, and the tools it may call.

The checks that take time run in the tokenization threads. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.model.errors import ClientError
from tailrace.router.api_types import ChatBody, SamplingBody
from tailrace.router.grammar_spec import GrammarCheck, GrammarSpec, grammar_spec
from tailrace.router.tokenization import Tokenization
from tailrace.router.tools import ToolPlan, ToolSupport, tool_plan

INLINE_BYTES = 65_536  # of a body; longer ones are looked at in a thread


@dataclass(frozen=True, slots=True)
class OutputForm:
    """`grammar`: as SamplingParams has it. `plan`: None where no calls are looked for."""

    grammar: str = ""
    plan: ToolPlan | None = None


_FREE = OutputForm()


class OutputForms:
    """Of one model.

    Args:
        tools: how it is told of tools and calls them.
    """

    def __init__(self, tools: ToolSupport, tokenization: Tokenization) -> None:
        self.tools, self._run = tools, tokenization.run
        self._check = GrammarCheck(tokenization.run)

    async def of(self, body: SamplingBody, num_bytes: int) -> OutputForm:
        """The form that a body of `num_bytes` asks for; raises ClientError (400) naming the field."""
        if num_bytes <= INLINE_BYTES:
            plan, spec = self._asked(body)
        else:
            plan, spec = await self._run(lambda: self._asked(body), num_bytes)
        if spec is None:
            return _FREE if plan is None else OutputForm("", plan)
        await self._check_all(spec, plan)
        return OutputForm(spec.text, plan)

    def _asked(self, body: SamplingBody) -> tuple[ToolPlan | None, GrammarSpec | None]:
        spec = grammar_spec(body)
        plan = tool_plan(body) if isinstance(body, ChatBody) else None
        return plan, spec if plan is None else self.tools.grammar(plan, spec)

    async def _check_all(self, spec: GrammarSpec, plan: ToolPlan | None) -> None:
        try:
            await self._check.check(spec)
        except ClientError:
            for alone in () if plan is None else self.tools.alone(plan):
                await self._check.check(alone)  # names the tool at fault, if one is
            raise
