# pyright: reportMissingImports=false
"""raggedright's compaction agent as one of verl's agent loops: a session emits one to four trajectories.

Every trajectory of the session gets its reward, as with the rewards of verl's reward loop.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from raggedright.agents.agent_session import RolloutSettings, Session, Task
from raggedright.agents.digits import compact
from raggedright.rollout.engine import Generation, Request, Sampling
from raggedright.sessions import SessionKey


@register("compaction")
class CompactionLoop(AgentLoopBase):
    """One session of the agent, with verl's servers behind it."""

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> list[AgentLoopOutput]:
        """All trajectories of a session, with its reward on each."""
        steps: set[int] = set()

        async def generate(request: Request) -> Generation:
            made = await self.server_manager.generate(
                request_id=f"{fields['uid']}/{fields['session_id']}",
                prompt_ids=[*request.ids],
                sampling_params={**sampling_params, "max_tokens": request.sampling.max_tokens, "noise": request.noise},
            )
            steps.add(made.extra_fields["global_steps"])
            return Generation(made.token_ids, made.log_probs, "stop", made.extra_fields["global_steps"])

        length = self.rollout_config.prompt_length + self.rollout_config.response_length
        session = Session(
            Task(uid=fields["uid"], data=fields["extra_info"]),
            SessionKey(fields["global_steps"], str(fields["index"]), fields["session_id"]),
            tokenizer=self.tokenizer,
            settings=RolloutSettings(
                sampling=Sampling(max_tokens=self.rollout_config.response_length), max_row_tokens=length
            ),
            generate=generate,
            context_tokens=length,
        )
        reward = await compact(session.task, session)
        versions = {"min_global_steps": min(steps), "max_global_steps": max(steps)}
        return [_output(row.fields, row.prompt_tokens, reward, versions) for row in session.record(reward).trajectories]


def _output(fields: Any, prompt_tokens: int, reward: float, versions: dict[str, int]) -> AgentLoopOutput:
    ids = fields["input_ids"].tolist()
    return AgentLoopOutput(
        prompt_ids=ids[:prompt_tokens],
        response_ids=ids[prompt_tokens:],
        response_mask=fields["response_mask"].tolist(),
        response_logprobs=fields["rollout_log_probs"].tolist(),
        reward_score=reward,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {}, **versions},
    )
