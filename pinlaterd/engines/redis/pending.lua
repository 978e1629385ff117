-- Read PENDING jobs in the order of (run-after, id). Arguments: the shard, queue, priority,
-- run-after in ms and id to begin behind (or '' and ''), the latest run-after in ms, limit. Returns
-- OK and a table of id and ms of each; or OK and two bounds: between them lie scores that PinLater
-- made, by which jobs of one millisecond are not in the order of their ids; or DAMAGED.

local queue, priority = take(), take()
local after_ms, after_id, until_ms, limit = take_number(), take(), take_number(), take_number()
local set = set_key(queue, priority, PENDING)
local problem = damage(set, 'zset')
if problem then
  return problem
end

-- Whether all scores that stand for a millisecond are of our making.
local function in_order(ms)
  if ms > LATEST_ORDERED_MS then
    return true -- a PinLater's job that is not to be run; any order will do
  end
  local low, high = window(ms)
  local ours = 0
  for digits = 1, MOST_DIGITS do
    local score = bound(score_of_digits(ms, digits))
    ours = ours + redis.call('ZCOUNT', set, score, score)
  end
  return ours == redis.call('ZCOUNT', set, bound(low), below(high))
end

-- All milliseconds from one score's to another's. Far in the future they have no width.
local function rescore(from_score, to_score)
  local low = window(ms_of(from_score))
  local _, high = window(ms_of(to_score))
  return { 'OK', bound(math.min(low, from_score)), bound(math.max(high, to_score)) }
end

local first = 0
if after_ms then
  if not in_order(after_ms) then
    return rescore(after_ms / 1000, after_ms / 1000)
  end
  first = rank_behind(set, score_of(after_ms, after_id), after_id)
end
local rows = redis.call('ZRANGE', set, first, first + limit - 1, 'WITHSCORES')
local found = {}
local last_ms
for at = 1, #rows, 2 do
  local id, score = rows[at], tonumber(rows[at + 1])
  local ms = ms_of(score)
  if ms > until_ms then
    last_ms = nil
    break
  end
  if not is_id(id) or (score ~= score_of(ms, id) and ms <= LATEST_ORDERED_MS) then
    return rescore(score, tonumber(rows[#rows]))
  end
  last_ms = ms
  found[#found + 1] = id
  found[#found + 1] = ms
end
-- The last millisecond may go on behind the page.
if last_ms and #rows == 2 * limit and not in_order(last_ms) then
  return rescore(last_ms / 1000, last_ms / 1000)
end
return { 'OK', found }
